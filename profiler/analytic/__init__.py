"""Profiles for hardware that is not here: counted work, a roofline, a table of devices."""
