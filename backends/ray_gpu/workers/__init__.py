"""The processes of a pipeline: trainer ranks, engines and the desk. Their modules import nothing heavy at the top; what
is heavy is imported inside the process, after its environment is set."""
