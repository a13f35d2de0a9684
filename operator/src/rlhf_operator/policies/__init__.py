"""What the operator decides by, one rule a file: each a pure function over what was asked, told and seen.

`suspend` and `deadlines` stop a job, `head_loss` gives a cluster up, `retries` says what an end means and whether there
is a next try, `ttl` removes what has finished, `edits` says when a spec has to be read anew.
"""
