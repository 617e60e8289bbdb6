"""Endpoints of the page's API, one module for each group; ``ui.server.ENDPOINTS`` lists them."""
