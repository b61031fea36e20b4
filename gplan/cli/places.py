"""The files that join the verbs: each reads what the one before it wrote."""

PROFILE_FILE, PLAN_FILE, RUN_FILE = "gplan.profile.json", "gplan.plan.json", "gplan.run.json"
VERIFICATION_FILE = "gplan.verification.json"
REPORT_FOLDER = "gplan-report"
CHECKPOINTS = "gplan-checkpoints"
