"""Clusters and virtual machines on Google Cloud, made and deleted through Google's own clients.

What is asked for (spec) and what it comes to (parts) are pure; everything that talks to Google Cloud goes through the
clients in access. Prices, quotas and what is free in a zone are known to Google Cloud only.
"""
