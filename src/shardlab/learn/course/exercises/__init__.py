"""The exercises of the course, one module each: `data_parallel`, then `pipelines`, then `models`."""
