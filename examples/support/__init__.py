"""Data, options and measurements that the examples share."""
