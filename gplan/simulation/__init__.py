"""A step laid out in time from stage costs and a schedule; its bubble, transfers and memory."""
