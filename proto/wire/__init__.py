"""What the sockets carry: messages by direction, their envelope, contexts as maps, versions."""
