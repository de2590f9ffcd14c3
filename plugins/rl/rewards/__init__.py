"""What scores answers: functions of the user's and the kit's own, in processes of their own."""
