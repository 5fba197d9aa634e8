"""A job as processes of this machine: the rehearsal of what a cluster does.

`plan` says what each host's process is, `supervisor` starts and watches them, `state` is what is on disk, `groups`
ends processes, and `backend` is what the commands call.
"""
