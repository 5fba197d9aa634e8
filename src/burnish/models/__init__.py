"""One decoder, described by a frozen ModelSpec; families/ holds what differs per family."""
