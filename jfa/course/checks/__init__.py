"""One module per chapter, ``NN_topic.py``, each with the list EXERCISES, which :mod:`jfa.course.catalog` loads."""
