"""The page: one HTML file that contains everything, for the screen and for printing."""
