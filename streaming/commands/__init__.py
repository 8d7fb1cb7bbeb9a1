"""A module per command of the command line: `add_options(parser)` and `run(options) -> exit status`."""
