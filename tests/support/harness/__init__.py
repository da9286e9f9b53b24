"""Running what is tested, and watching it: processes, servers, terminals, frames, stopwatches."""
