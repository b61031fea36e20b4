"""Pipeline schedules as ordered actions: names, orders, dependencies, validation and custom orders."""
