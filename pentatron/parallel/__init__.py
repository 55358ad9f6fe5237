"""Process groups, collectives, sharding, gradient buckets and the pipeline executor."""
