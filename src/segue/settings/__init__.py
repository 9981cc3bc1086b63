"""What did the operator ask for?

Every setting has one name: `--engine-url` on the command line, `SEGUE_ENGINE_URL` in the environment, `engine_url` in
`segue.toml`. A flag wins over the environment, the environment over the file, the file over the default. Only
`server/` and the commands read settings; everything below gets plain arguments or a value of its own.
"""
