"""The room that answers: what do a model's tokenizer files say, its vocabulary and its chat template?"""
