"""One rank: memory, worker, sampler, and the loop that ties them to the scheduler."""
