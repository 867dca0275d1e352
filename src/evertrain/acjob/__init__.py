"""What an AscendJob is: its schema, defaults, validation, conditions, and what it is made into. Pure."""
