"""The bracket language (Theorem 5.1, Lemmas G.1 to G.5, Theorem G.6): the flattest solution is the transferable one."""
