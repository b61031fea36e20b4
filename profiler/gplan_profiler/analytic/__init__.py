"""Profiles for hardware that is not present: counted work, a roofline model and a table of devices."""
