"""The Ray backend: directory, hosts, children and store actors."""
