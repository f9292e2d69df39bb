"""The round: propose, verify, accept, commit; and everything that decides which token is drawn."""
