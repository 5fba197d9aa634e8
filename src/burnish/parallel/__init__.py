"""Meshes of devices, the table of logical axes, start-up of many processes, facts about accelerators."""
