"""From a command to ranks: launchers, processes, the rendezvous of the ranks, interrupts, and job scripts.

Read ranks.py first: `run_ranks` calls a function on every rank, either in processes that processes.py starts here, or
in the world of a launcher that environment.py and launchers.py find in the environment variables. interrupt.py turns
signals into requests to stop. commands.py and worker.py run any other program on several ranks (`shardlab launch`), and
job_script.py submits a run to SLURM or PBS.
"""
