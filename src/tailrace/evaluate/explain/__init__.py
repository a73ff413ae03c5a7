"""Why a policy decides as it does: audits, single states, disagreements with a rule."""
