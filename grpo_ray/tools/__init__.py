"""The command line, one folder per command; `cli.COMMANDS` lists the commands."""
