"""Helpers that know nothing of parallel training: errors, text, files, fields of settings, files of users."""
