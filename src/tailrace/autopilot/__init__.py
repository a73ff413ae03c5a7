"""The best policy for the present traffic: proposed by the simulator, proven on live requests."""
