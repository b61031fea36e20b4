"""Other planners and frameworks: their files in, gplan's plans out in their words."""
