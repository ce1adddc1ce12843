"""Which nodes of a network make a stage, and which devices hold it.

  graph.Graph -> placement.balance, pipedream, mixed_pipe -> placement.Partition

`graph` describes a network, or measures one; `coarsen` merges its nodes for
`mixed_pipe`. Begin with `placement`.
"""
