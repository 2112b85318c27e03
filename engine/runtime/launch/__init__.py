"""Plans of a worker's memory and threads."""
