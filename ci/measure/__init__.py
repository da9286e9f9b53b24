"""Scripts that measure or attack a worker; ``ci/measurement NAME`` runs one."""
