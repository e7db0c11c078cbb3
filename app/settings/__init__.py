"""Settings of commands: flags, YAML files and their errors."""
