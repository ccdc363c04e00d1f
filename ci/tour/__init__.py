"""What ci/demo shows: a sharded training run on simulated ranks, and two bugs caught."""
