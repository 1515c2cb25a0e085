"""The subcommands of `d3d`: `options` says what each takes, the module of its name does it."""
