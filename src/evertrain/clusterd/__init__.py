"""The cluster brain: sees every fault, knows which ranks of which job it hits, decides and leads the recovery."""
