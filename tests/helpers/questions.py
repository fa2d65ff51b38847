"""A text that has questions of every task of the suite."""

TEXT = "".join(
    f"def name{i}(value{i}, other{i % 3}, things):\n"
    f'    """The sum of numbers that were given. It is kept in a table of results."""\n'
    f"    table = {{value{i}: [things.first, other{i % 3} * {i}], 'second': name{i}(other{i % 3} + 1, value{i})}}\n"
    f"    return table[value{i}] + things.last(other{i % 3} + value{i})\n\n\n"
    for i in range(40)
)
