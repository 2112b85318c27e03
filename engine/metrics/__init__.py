"""What one engine counts, exports to Prometheus and logs."""
