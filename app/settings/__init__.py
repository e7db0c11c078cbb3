"""What a user asks for: flags, YAML files, and what is wrong with them."""
