"""Plan campaigns and run them."""
