"""Certificates, and the credentials that the processes of a cluster show each other."""
