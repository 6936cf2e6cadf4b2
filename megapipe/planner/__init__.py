"""What a run will take, before it runs: memory and traffic of every rank. Without torch or triton."""
