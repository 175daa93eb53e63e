"""The Python API. `import drafttrain` offers these names and loads them when they are first used."""
