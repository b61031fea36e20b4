"""Every schedule as ordered actions: names, orders, dependencies, validation and orders of the user's own."""
