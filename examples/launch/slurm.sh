#!/bin/bash
#SBATCH --job-name=gpt2_124m
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# sbatch examples/launch/slurm.sh: a process for each GPU; with --ntasks-per-node=1, one for each node.
#
# Five minutes ahead of the time limit the run is told to stop. It saves, ends with 0, and the job queues again, to go on
# from there. Preemption does the same where the cluster sets PreemptParameters=send_user_signal. At a SIGTERM of its own
# srun would kill the tasks; scancel hands it to them.
trap 'stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --label \
    python examples/train_lm.py gpt2_124m --folder runs/gpt2_124m --strategy.mesh data=-1 &
wait $! # until the end, or the signal
wait $!
code=$?
if [[ $stopped == yes && $code == 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
