"""The weight cache of one pipeline on one node: versions in packed buckets, in shared memory."""
