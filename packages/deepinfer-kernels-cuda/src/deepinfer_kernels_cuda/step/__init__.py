"""Step plumbing: rows of ragged sequences, corrections from the carry of the step before."""
