"""Runs that are killed, stopped and starved at random: what comes of them equals what nobody disturbed."""
