"""Tools that any package uses: leases of directories, requests to stop, copies in object stores."""
