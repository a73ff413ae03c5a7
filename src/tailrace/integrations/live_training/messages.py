"""Messages on the pipe between the learner and the process of its live router."""

#: To the router: (RECORD, params, temperature, epsilon), (USE, params) or (STOP,).
RECORD, USE, STOP = "record", "use", "stop"
#: From the router, each with a value: its address, decisions recorded so far, a rollout, a summary
#: at its end, the text of an error.
LISTENING, RECORDED, ROLLOUT, STOPPED, ERROR = (
    "listening", "recorded", "rollout", "stopped", "error",
)  # fmt: skip
