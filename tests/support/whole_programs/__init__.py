"""Random whole programs: what they are, how they are made, what they mean, how they are run, how a failure is made small."""
